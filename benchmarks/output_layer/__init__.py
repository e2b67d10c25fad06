"""The output layer's forward and backward pass, side by side with its peers."""
