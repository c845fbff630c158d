"""What `firstorder bench` times: our engine and steps beside those of transformers and TRL, and their memory."""
