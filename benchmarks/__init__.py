"""What is timed against what, and how: `measure` does it, `cpu` is a machine to do it on, `demo` is the short tour."""
