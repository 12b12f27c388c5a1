//! `[[qos.cpu_class]]`: service classes of CPU time.

use portolan_control::qos::cpu::{ClassTerms, Overbooking};
use serde::Deserialize;

use super::error::ConfigError;

/// A service class (MS §V).
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CpuClass {
    pub name: String,
    /// `R_k`: part of the reservable time of all CPUs.
    pub share: f64,
    /// `b_k`.
    #[serde(default)]
    pub overbooking: Overbook,
    /// Part of the class that each user other than root may reserve; with 0 only root may reserve.
    #[serde(default = "half")]
    pub each_user: f64,
}

/// A number, or `"unbounded"`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum Overbook {
    By(f64),
    Word(String),
}

impl Default for Overbook {
    fn default() -> Overbook {
        Overbook::By(0.0)
    }
}

fn half() -> f64 {
    0.5
}

impl CpuClass {
    /// The class if none is configured: half for root's reservations, the rest for everything else.
    pub(crate) fn default_class() -> CpuClass {
        CpuClass {
            name: "default".to_owned(),
            share: 0.5,
            overbooking: Overbook::default(),
            each_user: 0.0,
        }
    }

    pub(crate) fn terms(&self) -> Option<ClassTerms> {
        let overbooking = match &self.overbooking {
            Overbook::By(b) if (0.0..=MOST_OVERBOOKING).contains(b) => {
                Overbooking::UpTo(millionths(*b))
            }
            Overbook::Word(word) if word == "unbounded" => Overbooking::Unbounded,
            _ => return None,
        };
        let is_sound = 0.0 < self.share && self.share <= 1.0;
        (is_sound && (0.0..=1.0).contains(&self.each_user)).then(|| ClassTerms {
            name: self.name.clone(),
            share_ppm: millionths(self.share),
            overbooking,
            each_user_ppm: millionths(self.each_user),
        })
    }
}

/// Beyond this it may as well be unbounded.
const MOST_OVERBOOKING: f64 = 1000.0;

/// Converts a number between 0 and [`MOST_OVERBOOKING`].
fn millionths(part: f64) -> u32 {
    (part * 1e6).round() as u32
}

/// Checks that each class is valid, that names are unique, and that the shares do not exceed the whole.
pub(super) fn check(classes: &[CpuClass]) -> Result<(), ConfigError> {
    let mut total = 0;
    for (i, class) in classes.iter().enumerate() {
        let name = || class.name.clone();
        let terms = class.terms().ok_or_else(|| ConfigError::CpuClass(name()))?;
        total += u64::from(terms.share_ppm);
        if class.name.is_empty() || classes[..i].iter().any(|other| other.name == class.name) {
            return Err(ConfigError::CpuClassName(name()));
        }
    }
    match total {
        0..=1_000_000 => Ok(()),
        _ => Err(ConfigError::CpuShares),
    }
}
