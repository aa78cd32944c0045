"""What a run does when something goes wrong while it trains: find the cause, or refuse to go on."""
