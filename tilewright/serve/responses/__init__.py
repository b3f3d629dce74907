"""The Responses API: its requests as chats, its answers as items and events, its store."""
