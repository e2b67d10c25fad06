"""Next-item prediction: the head with and without the rule, beside popularity and item-kNN, on catalogues that grow."""
