"""Placeholder replaced in the next commit."""


def main() -> None: ...
