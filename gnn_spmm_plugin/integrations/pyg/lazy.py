"""The lazy gather: what ``message()`` gets for ``x_j`` in place of one row of features per edge.

A `LazyMessage` looks like the tensor that PyG would have gathered. It answers questions about shape, dtype and device
by itself, takes up edge weights it is multiplied with, and lets element-wise operations run on the nodes before the
gather. The aggregation that follows asks it for its parts (`Pending`). Everything else that is done to it, in Python or
below, makes it gather, once, exactly as PyG does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...functional import spmm
from ...graph import Graph
from .records import Gathers, Record

PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def version(t: Tensor) -> int:
    """The version counter; -1 for tensors made in inference mode, which have none."""
    return -1 if t.is_inference() else t._version


class Pending:
    """The parts of messages that were not written: ``src`` gathered along ``dim`` by ``index``, times each factor.

    ``src`` and the factors require gradients exactly if the messages do: what was made under ``no_grad`` is detached.

    Attributes:
        src: ``[.., N, ..]`` features.
        index: ``[E]`` the row of each message.
        dim: the dimension of both the nodes and the messages, not negative.
        factors: what the messages are multiplied with, one value (or one for each head) per edge, as the layer gave it.
        rows: the messages themselves, once something needed them.
    """

    __slots__ = (
        "dim",
        "dtype",
        "factors",
        "gather",
        "hooks",
        "index",
        "linked",
        "parent",
        "record",
        "results",
        "rows",
        "shape",
        "src",
        "tally",
        "tied",
        "versions",
        "via",
        "zeros",
    )

    def __init__(
        self,
        src: Tensor,
        index: Tensor,
        dim: int,
        gather: Callable[[Tensor, Tensor, int], Tensor],
        record: Record,
        tally: Gathers,
        linked: bool,
        factors: tuple[Tensor, ...] = (),
    ) -> None:
        self.src, self.index, self.dim, self.gather = src, index, dim, gather
        self.record, self.tally = record, tally
        self.factors = factors
        self.linked = linked  # whether to tie the lazy tensor into the autograd graph ...
        self.tied = False  # ... and whether that was done
        self.shape = torch.Size((*src.shape[:dim], index.shape[0], *src.shape[dim + 1 :]))
        dtype = src.dtype
        for factor in factors:
            if factor.is_floating_point():
                dtype = torch.promote_types(dtype, factor.dtype)
        self.dtype = dtype
        self.versions = self.versions_now()
        self.rows: Tensor | None = None
        self.results: dict[Any, tuple[Tensor, int]] = {}  # aggregations so far and their versions: PyG repeats some
        self.parent: Pending | None = None  # for a view of other messages: whose, and how it was made
        self.via: Callable[[Tensor], Tensor] | None = None
        self.hooks = saved_tensor_hooks()
        self.zeros: Any = None  # (weak reference to the last tensor made by new_zeros, its version)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that messages are computed from, in the order in which `recipe` takes them."""
        return (self.src, *self.factors)

    def named(self) -> tuple[str, ...]:
        """What a user calls each of `parts`."""
        return ("the features", *("edge weights" for _ in self.factors))

    def recipe(self) -> Callable[..., Tensor]:
        """What makes the messages of `parts`; it holds none of them."""
        return functools.partial(_gathered, self.gather, self.index, self.dim)

    def versions_now(self) -> tuple[int, ...]:
        """The versions of all that messages are made of."""
        return tuple(version(t) for t in (*self.parts, self.index))

    @property
    def requires_grad(self) -> bool:
        """Whether the messages would require a gradient."""
        return any(t.requires_grad for t in self.parts)

    @property
    def pristine(self) -> bool:
        """Whether nobody has seen, and so perhaps changed, the messages themselves."""
        return self.rows is None and (self.parent is None or self.parent.pristine)

    def miss(self, reason: str) -> None:
        """Counts that the messages have to be written."""
        self.tally.missed += 1
        self.tally.reason = reason
        self.record.miss(reason)

    def check(self) -> None:
        """Raises RuntimeError if what the messages are made of changed since they were asked for."""
        now = self.versions_now()
        if now != self.versions:
            names = (*self.named(), "edge_index")
            what = next(name for name, a, b in zip(names, now, self.versions, strict=True) if a != b)
            raise RuntimeError(
                f"{self.record.name}: {what} were changed in place between the gather and the aggregation, so the "
                "messages of the moment of the gather are gone; change a copy (x = x.clone()), or leave this layer out "
                "with gnn_spmm_plugin.restore(layer)"
            )

    def materialize(self) -> Tensor:
        """The messages, as PyG would have made them."""
        if self.rows is None:
            if self.parent is not None and self.via is not None:
                self.rows = self.via(self.parent.materialize())
            else:
                self.check()
                with torch.set_grad_enabled(torch.is_grad_enabled() or self.requires_grad):
                    if saved_tensor_hooks() == self.hooks:
                        self.rows = self.recipe()(*self.parts)
                    else:  # the hooks of a checkpoint that began since are not meant for what came before
                        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
                            self.rows = self.recipe()(*self.parts)
        return self.rows

    # ------------------------------------------------------------------ other messages made from these

    def derive(self, src: Tensor | None = None, *more: Tensor) -> LazyMessage:
        """Messages from other features, or with more factors, under the grad mode of now."""
        src = self.src if src is None else src
        made = self.like(src, (*self.factors, *more))
        return wrap(made if torch.is_grad_enabled() else made.constant())

    def like(self, src: Tensor, factors: tuple[Tensor, ...]) -> Pending:
        """These messages with other features and factors."""
        return Pending(src, self.index, self.dim, self.gather, self.record, self.tally, self.linked, factors)

    def constant(self) -> Pending:
        """These messages without gradient."""
        return self.like(constant(self.src), tuple(map(constant, self.factors))) if self.requires_grad else self

    def view_of(self, child: Pending, via: Callable[[Tensor], Tensor]) -> LazyMessage:
        """`child` as a view of these messages: it shares their memory once they have any."""
        enabled = torch.is_grad_enabled()

        def replay(rows: Tensor) -> Tensor:
            with torch.set_grad_enabled(enabled):
                return via(rows)

        child.parent, child.via = self, replay
        return wrap(child)

    def per_node(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        """An element-wise function of the messages, computed on the nodes; NotImplemented where that does not pay."""
        if self.factors or self.src.shape[self.dim] > self.index.shape[0]:
            return NotImplemented
        self.check()
        result = function(self.src, *args, **kwargs)
        if result.shape != self.src.shape or not result.is_floating_point():
            return NotImplemented
        return self.derive(result)

    def varying(self, t: Tensor) -> tuple[bool, list[int]] | None:
        """How `t` broadcasts to the messages: (one value per message?, other dimensions of size over 1), or None."""
        pad = len(self.shape) - t.dim()
        if pad < 0:
            return None
        others, per_edge = [], False
        for d in range(pad, len(self.shape)):
            size = t.shape[d - pad]
            if size == 1:
                continue
            if size != self.shape[d]:
                return None
            if d == self.dim:
                per_edge = True
            else:
                others.append(d)
        return per_edge, others

    def scaled(self, t: Tensor) -> Any:
        """The messages times `t`; NotImplemented unless `t` is one value per message (and head), or per feature."""
        if type(t) not in PLAIN or t.device != self.src.device or t.is_complex() or t.layout != torch.strided:
            return NotImplemented
        found = self.varying(t)
        if found is None:
            return NotImplemented
        per_edge, others = found
        if not per_edge:
            return NotImplemented if t.requires_grad else self.per_node(torch.mul, t)
        if others and not self._are_heads(others):
            return NotImplemented
        return self.derive(None, t)

    def _are_heads(self, dims: list[int]) -> bool:
        rest = [d for d in range(len(self.shape)) if d != self.dim]
        return dims == rest[:1] and len(rest) > 1

    def squared(self) -> Any:
        """The messages times themselves."""
        if self.factors and any(f.requires_grad for f in self.factors):
            return NotImplemented
        plain = Pending(self.src, self.index, self.dim, self.gather, self.record, self.tally, self.linked)
        plain.versions = (self.versions[0], self.versions[-1])
        squares = plain.per_node(torch.square)
        if squares is NotImplemented or not self.factors:
            return squares
        return squares.pending.derive(None, *self.factors, *self.factors)

    def plus(self, term: Any) -> Any:
        """The messages plus `term`, where that is a row of features for each edge; else NotImplemented."""
        from .edges import EdgeSum

        return NotImplemented if self.factors else EdgeSum.of(self, term)

    # ------------------------------------------------------------------ what the aggregation needs

    def operation(self, reduce: str) -> str:
        """What `report` calls it."""
        return reduce

    def aggregated(self, graph: Graph, reduce: str, tie: str, policy: str) -> Tensor | None:
        """The messages reduced over the edges of `graph`, ``[num_dst, ...]``; None where that takes each of them."""
        x = self.src if self.dim == 0 else self.src.movedim(self.dim, 0)
        weight = self.weight()
        if weight is not None and weight.dtype != self.dtype:
            weight = weight.to(self.dtype)
        return spmm(graph, x, weight, reduce, tie=tie, policy=policy)  # type: ignore[return-value]

    def weight(self) -> Tensor | None:
        """The product of the factors: ``[E]`` or ``[E, H]``; the caller's own tensor wherever one is that already."""
        product: Tensor | None = None
        for factor in self.factors:
            flat = self._flat(factor)
            if product is None:
                product = flat
            else:  # which PyG multiplies with the messages, one after the other
                product = product.to(torch.promote_types(self.src.dtype, product.dtype))
                heads = product.dim() != flat.dim()
                product = _as_heads(product) * _as_heads(flat) if heads else product * flat
        return product

    def _flat(self, factor: Tensor) -> Tensor:
        count = self.shape[self.dim]
        pad = len(self.shape) - factor.dim()
        if not factor.is_floating_point():
            factor = factor.to(self.src.dtype)
        stride = factor.stride(self.dim - pad)
        base = factor._base
        heads = factor.numel() // count
        shape = (count,) if heads == 1 else (count, heads)
        # A view is another object in every step; its base is the one that the permuted copy is found by.
        if (
            base is not None
            and type(base) in PLAIN
            and base.shape == shape
            and base.dtype == factor.dtype
            and base.is_contiguous()
            and base.storage_offset() == factor.storage_offset()
            and stride == heads
            and not base.requires_grad
            and not factor.requires_grad
            and (heads == 1 or factor.stride(self._head_dim() - pad) == 1)
        ):
            return base
        if factor.shape == shape:
            return factor
        return factor.movedim(self.dim - pad, 0).reshape(shape)

    def _head_dim(self) -> int:
        return 1 if self.dim == 0 else 0


def _gathered(
    gather: Callable[[Tensor, Tensor, int], Tensor], index: Tensor, dim: int, src: Tensor, *factors: Tensor
) -> Tensor:
    rows = gather(src, index, dim)
    for factor in factors:
        rows = rows * factor
    return rows


def saved_tensor_hooks() -> Any:
    """The hooks that are on for tensors saved for the backward, as those of a checkpoint; None without."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _same(t: Tensor) -> Tensor:
    return t


def _as_heads(weight: Tensor) -> Tensor:
    return weight.unsqueeze(1) if weight.dim() == 1 else weight


def constant(t: Tensor) -> Tensor:
    """`t` without gradient; itself where it has none."""
    return t.detach() if t.requires_grad else t


class LazyMessage(Tensor):
    """A tensor of messages that is not there until something needs it; see the module."""

    pending: Pending
    attached: Tensor | None = None

    @classmethod
    def make(cls, pending: Any) -> Any:
        """A tensor without memory. Code below Python that asks for its layout, as any that reads it must, raises."""
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            pending.shape,
            dtype=pending.dtype,
            device=pending.src.device,
            dispatch_sizes_strides_policy="strides",
        )
        made.pending = pending
        return made

    def requires_grad_below(self) -> bool:
        """Whether autograd itself knows that gradients come back to this tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return bool(self.requires_grad)

    def adopted(self) -> bool:
        """Whether an autograd function that returned this tensor gave it a gradient that its parts know nothing of."""
        return not self.pending.tied and self.requires_grad_below()

    def written(self) -> Tensor:
        """The messages as a plain tensor."""
        if not self.adopted():
            return self.pending.materialize()
        if self.attached is None:
            with torch.enable_grad():
                self.attached = _Attach.apply(self)
        assert self.attached is not None
        return self.attached

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from .operations import HANDLERS, materialized

        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            with torch._C.DisableTorchFunctionSubclass():
                result = handler(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return func(*materialized(func, args), **materialized(func, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Reached only by code that goes around __torch_function__: autograd functions, vmap, C++ extensions.
        from .operations import below

        return below(func, args, kwargs or {})


class _Link(torch.autograd.Function):
    """Ties the lazy tensor itself into the autograd graph, for code that passes it on without looking at it."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, *parts: Tensor) -> LazyMessage:
        ctx.save_for_backward(*parts)
        ctx.recipe = pending.recipe()
        pending.tied = True
        return LazyMessage.make(pending)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (None, *gradients(ctx.recipe, ctx.saved_tensors, grad))


def gradients(recipe: Any, parts: tuple[Tensor, ...], grad: Tensor) -> list[Tensor | None]:
    """Of ``recipe(*parts)`` by each part that asks for one; the same tensor may be several of them."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        apart = [t.view_as(t) for t in parts]
        wanted = [t for t in apart if t.requires_grad]
        found = iter(torch.autograd.grad(recipe(*apart), wanted, grad, create_graph=create_graph))
    return [next(found) if t.requires_grad else None for t in apart]


class _Attach(torch.autograd.Function):
    """The messages of a lazy tensor that an autograd function returned, with that function as their origin."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyMessage) -> Tensor:
        return lazy.pending.materialize().detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def wrap(pending: Pending) -> LazyMessage:
    """The tensor that stands for `pending`."""
    if pending.linked and pending.requires_grad and torch.is_grad_enabled():
        linked: LazyMessage = _Link.apply(pending, *pending.parts)
        return linked
    made: LazyMessage = LazyMessage.make(pending)
    return made
