"""The one boundary between Phasor's own types and gRPC: channels, status codes, message conversion."""
