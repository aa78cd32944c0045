"""What makes CPU ranks fast: attention, experts, shared-memory transport."""
