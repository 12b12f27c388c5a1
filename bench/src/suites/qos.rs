//! Guarantees (NE §5, MS §V): whether they are kept, and what they cost others. Figures are errors of
//! guarantees, with a bar each; their names begin with the paper's figure.

pub(crate) mod cpu;
pub(crate) mod receive;
pub(crate) mod transmit;

use super::Case;
use crate::Effort;

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let mut cases = transmit::cases(effort);
    cases.extend(receive::cases(effort));
    cases.extend(cpu::cases(effort));
    cases
}
