"""The parts of a report page: text, tables and plots in one HTML file."""
