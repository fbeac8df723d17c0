"""The weight-sync actors, one module a trainer-engine pair."""
