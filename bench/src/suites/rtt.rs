//! Round-trip times as measured by protolat: one message at a time, both sides spinning or both
//! sleeping, one core each. The figure is the median round trip of a run.

use super::{Better, Case, Reach};
use crate::bed::{Bed, Side, Stack};
use crate::figure::Sample;
use crate::process::Background;
use crate::{Effort, MeasureError};

const PORT: u16 = 7007;

/// Payloads in bytes; the last fills an Ethernet frame.
const TCP_SIZES: [usize; 5] = [1, 100, 512, 1024, 1460];
const UDP_SIZES: [usize; 5] = [1, 100, 512, 1024, 1472];

#[derive(Clone)]
struct RoundTrip {
    protocol: &'static str,
    size: usize,
    spin: bool,
    count: usize,
    reach: Reach,
}

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    over(
        Reach::Wire,
        &[("tcp", TCP_SIZES), ("udp", UDP_SIZES)],
        effort,
    )
}

/// TCP between two programs of one host.
pub(super) fn local_cases(effort: Effort) -> Vec<Case> {
    over(Reach::Host, &[("tcp", TCP_SIZES)], effort)
}

fn over(reach: Reach, protocols: &[(&'static str, [usize; 5])], effort: Effort) -> Vec<Case> {
    let mut cases = Vec::new();
    for (protocol, sizes) in protocols {
        let sizes = if effort.quick {
            &sizes[..1]
        } else {
            &sizes[..]
        };
        for &size in sizes {
            for spin in [true, false] {
                let count = effort.scaled(if spin { 40_000.0 } else { 10_000.0 }) as usize;
                cases.push(
                    RoundTrip {
                        protocol,
                        size,
                        spin,
                        count,
                        reach,
                    }
                    .into_case(),
                );
            }
        }
    }
    cases
}

impl RoundTrip {
    fn into_case(self) -> Case {
        let wait = if self.spin { "spin" } else { "sleep" };
        let prefix = self.reach.prefix();
        let name = format!("{prefix}{}-{}-{wait}", self.protocol, self.size);
        Case::new(name, "us", Better::Lower, move |bed, stack| {
            self.measure(bed, stack)
        })
    }

    fn measure(&self, bed: &Bed, stack: Stack) -> Result<Sample, MeasureError> {
        let endpoint = self.reach.endpoint(bed, PORT).to_string();
        let size = self.size.to_string();
        let mut echo = vec!["echo", self.protocol, &endpoint, "--size", &size];
        let count = self.count.to_string();
        let mut ping = vec![
            "ping",
            self.protocol,
            &endpoint,
            "--size",
            &size,
            "--count",
            &count,
        ];
        if self.spin {
            echo.push("--spin");
            ping.push("--spin");
        }
        let _server = self.serve(bed, stack, &echo)?;
        self.reach.round_trips(bed, stack, &ping)
    }

    /// Starts the server. Over UDP, the client itself retries until the server is ready.
    fn serve(
        &self,
        bed: &Bed,
        stack: Stack,
        arguments: &[&str],
    ) -> Result<Background, MeasureError> {
        const PROGRAM: &str = "portolan-traffic";
        if self.protocol == "tcp" {
            return Ok(bed.serve(stack, PORT, PROGRAM, arguments)?);
        }
        let mut command = bed.command(Side::Server, stack, PROGRAM);
        Ok(Background::start(command.args(arguments))?)
    }
}
