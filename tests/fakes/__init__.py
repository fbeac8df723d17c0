"""Stand-ins that speak the real calls, need no hardware, and misbehave when told to."""
