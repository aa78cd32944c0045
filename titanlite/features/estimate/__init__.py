"""What a run will take, before it is started: memory, bytes read, communication, time. Needs no GPU and no weights."""
