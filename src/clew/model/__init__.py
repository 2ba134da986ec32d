"""Plain data that every room speaks; standard library only."""
