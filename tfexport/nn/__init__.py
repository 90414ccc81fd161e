"""The from-scratch transformer that every stage is measured against."""
