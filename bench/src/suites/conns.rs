//! Connections per second: connect, one octet, close, one after the other.

use super::{Better, Case, traffic};
use crate::Effort;

const PORT: u16 = 7008;

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let seconds = effort.scaled(1.0).to_string();
    vec![Case::new(
        "connect-close",
        "conn/s",
        Better::Higher,
        move |bed, stack| {
            let endpoint = bed.endpoint(PORT).to_string();
            let _server = bed.serve(stack, PORT, "portolan-traffic", &["greet", &endpoint])?;
            traffic(
                bed,
                stack,
                &["connect", &endpoint, "--seconds", &seconds],
                "per_second",
            )
        },
    )]
}
