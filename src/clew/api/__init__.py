"""Where the rooms meet: the functions a user calls."""
