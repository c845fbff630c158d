"""Routing of a mixture of experts as data: records of routes, their replay, prediction and comparison."""
