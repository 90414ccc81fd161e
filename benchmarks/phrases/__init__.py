"""A translation task that can be made anywhere: phrases of numbers, dates, money, units and names in ten languages."""
