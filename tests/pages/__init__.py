"""Pages of docs/ that are computed: what computes each, and the test that computes rows of it again."""
