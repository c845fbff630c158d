"""The command `firstorder`: one small file per subcommand, and a world imported only when a config names it."""

__version__ = "0.1.0"
