"""Routing of a mixture of experts as data: records of what routers did, replaying them, predicting them, comparing them."""
