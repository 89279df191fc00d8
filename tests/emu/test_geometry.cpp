// How threads share rows and columns: what must hold of every choice, and what was chosen on
// purpose.
#include "common/geometry.h"
#include "kernel_checks.h"

namespace {

using checks::expect;
using gsp::Geometry;
using gsp::Work;

bool is_power(int v) { return v >= 1 && (v & (v - 1)) == 0; }

void test_every_choice_fits_a_warp() {
  for (const int64_t rows : {0, 1, 100, 5000, 20'000, 3'000'000}) {
    for (const int64_t degree : {0, 3, 7, 30, 70, 900}) {
      for (int64_t vectors = 1; vectors <= 130; ++vectors) {
        for (const int options : {0, 1, 2, 3, 5, 7}) {
          const bool fold = options & 1, lines = options & 2;
          const int64_t longest = options & 4 ? 3 * degree + 1 : 0;
          const Geometry g = gsp::choose_geometry(
              {rows, rows * degree, rows, vectors, 16, int64_t(50) << 20, fold, lines, longest});
          const bool fits = is_power(g.lanes) && is_power(g.parallel) &&
                            g.lanes * g.parallel <= 32 && (g.fold == 1 || (fold && g.fold == 2));
          expect(fits, "%d rows of %d edges, %d vectors: %d lanes, fold %d, %d groups", int(rows),
                 int(degree), int(vectors), g.lanes, g.fold, g.parallel);
        }
      }
    }
  }
}

void expect_choice(const char* what, const Work& w, Geometry want) {
  const Geometry g = gsp::choose_geometry(w);
  expect(g.lanes == want.lanes && g.fold == want.fold && g.parallel == want.parallel,
         "%s: %d lanes, fold %d, %d groups, expected %d, %d, %d", what, g.lanes, g.fold, g.parallel,
         want.lanes, want.fold, want.parallel);
}

void test_choices() {
  const int64_t l2 = int64_t(50) << 20, many = 1'000'000;
  expect_choice("whole lines, in passes", {many, 10 * many, many, 32, 16, l2, true}, {8, 2, 1});
  expect_choice("shared lines, at once", {many, 10 * many, many, 25, 16, l2, true, false},
                {16, 2, 1});
  expect_choice("short rows, at once", {many, 3 * many, many, 64, 16, l2, true}, {32, 2, 1});
  expect_choice("half a pass fits the L2", {many, 10 * many, 250'000, 32, 16, l2, true}, {4, 2, 1});
  expect_choice("long rows", {many, 130 * many, many, 16, 16, l2, true}, {8, 2, 4});
  expect_choice("a warp a row", {2708, 10'000, 2708, 4, 16, l2, true}, {2, 2, 16});
  expect_choice("a warp a row, wide", {2708, 10'000, 2708, 32, 16, l2, true}, {8, 2, 4});
  expect_choice("a warp a row, no folds", {2708, 10'000, 2708, 4, 16, l2, false}, {4, 1, 8});
  expect_choice("few rows, very wide", {8, 16, 8, 65535 * 16, 16, l2, true}, {8, 2, 4});
  expect_choice("few rows, wider still", {8, 16, 8, 65535 * 16 + 1, 16, l2, true}, {32, 2, 1});
  expect_choice("short rows of few", {8100, 22'000, 8100, 4, 16, l2, true, true, 4}, {2, 2, 1});
  expect_choice("16 edges a group", {2708, 10'000, 2708, 4, 16, l2, true, true, 128}, {2, 2, 8});
  expect_choice("one more", {2708, 10'000, 2708, 4, 16, l2, true, true, 129}, {2, 2, 16});
  expect_choice("more rows, some long", {10'000, 48'000, 10'000, 4, 16, l2, true, true, 90},
                {4, 1, 8});
  expect_choice("enough threads", {20'000, 80'000, 20'000, 16, 16, l2, true, true, 90}, {8, 2, 4});
  expect_choice("enough of them", {40'000, 90'000, 40'000, 16, 16, l2, true, true, 90}, {8, 2, 2});
  expect_choice("narrower passes", {2708, 200'000, 2708, 16, 16, l2, true}, {8, 1, 4});
  expect(gsp::stream_lanes(8) == 4 && gsp::stream_lanes(25) == 16 && gsp::stream_lanes(200) == 16,
         "lanes of bundles");
}

}  // namespace

int main() {
  test_every_choice_fits_a_warp();
  test_choices();
  return checks::finish();
}
