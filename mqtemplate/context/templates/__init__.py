"""Further templates of an application: their classes, their settings, and the brokers that they and listeners use."""
