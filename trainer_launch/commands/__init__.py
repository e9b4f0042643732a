"""One command, one file: gather values, call the line, print."""
