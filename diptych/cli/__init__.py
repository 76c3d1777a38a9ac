"""The `diptych` command: starts services as child processes, and speaks to a router. Imports none."""
