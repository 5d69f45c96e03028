"""From a running model to stored records."""
