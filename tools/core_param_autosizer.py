"""Prints the sizes of the cdrmix-core variants, or sizes a new one: --target-active 3B."""

from cdrmix.planning.autosize import autosizer

if __name__ == "__main__":
    autosizer("core")
