"""Solutions for others: as a pull request, a contest's entry or a package, with what backs them."""
