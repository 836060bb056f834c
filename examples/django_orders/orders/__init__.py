"""The app with orders."""
