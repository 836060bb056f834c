"""How requests reach their processors, and how they are answered."""
