"""Time model of a device program, fitted on published rows."""
