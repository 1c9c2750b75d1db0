"""The commands for a fleet over Flower, and the apps that Flower starts."""
