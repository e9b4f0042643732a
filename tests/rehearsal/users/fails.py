"""It ends with an error before its first step."""

raise SystemExit(2)
