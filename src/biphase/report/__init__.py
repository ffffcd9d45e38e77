"""Terminal tables, plots and pages."""
