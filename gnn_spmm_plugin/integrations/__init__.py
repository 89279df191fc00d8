"""Putting the operators under existing models of other libraries, undoably. Importing this patches nothing."""
