"""The networks under the head: each maps a batch of inputs to a batch of feature vectors."""
