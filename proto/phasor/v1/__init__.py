"""Generated from the .proto files beside it by `make proto`; committed, and compared in CI."""
