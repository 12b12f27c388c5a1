//! Admission to a link: reservations, groups, and what is left for all others.
