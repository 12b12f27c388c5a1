//! Sessions that move between holders: recall, relay, the far ends of their descriptors.

pub mod descriptors;
pub mod recall;
pub mod relay;
pub mod sessions;
