"""What sees tensors in a running training and turns them into records, without changing anything."""
