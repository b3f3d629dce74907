"""Our server beside another, loaded by one client."""
