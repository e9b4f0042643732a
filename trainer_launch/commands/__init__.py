"""A command is a file: gather values, call the line, print."""
