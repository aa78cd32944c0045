"""Chats with images."""
