"""The command `firstorder`: one small file a subcommand, and a world imported only when a config asks for it."""
