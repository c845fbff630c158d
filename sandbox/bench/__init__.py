"""The subjects of `firstorder bench`: our engine and steps beside those of transformers and TRL, and their memory."""
