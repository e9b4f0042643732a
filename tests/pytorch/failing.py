"""A module that fails when it is run."""

import sys

print(sys.argv[1:], __name__, __spec__ and __spec__.name)


def fail() -> None:
    raise ValueError("in a module")


if __name__ == "__main__":
    fail()
