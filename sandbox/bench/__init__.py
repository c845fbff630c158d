"""The work that `firstorder bench` times: our engine and steps beside transformers' and TRL's, and their memory."""
