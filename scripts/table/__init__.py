"""Rankings of recorded results, and every table of them."""
