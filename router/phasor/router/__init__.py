"""The router: validates, chooses workers, and follows each request to its end. No torch, no Ray."""
