//! Whole applications, as Debian packages them: databases, proxies, web and mail servers with the clients that their users
//! load them with. A case whose programs are not installed is left out.

mod databases;
mod mail;
mod web;

use std::path::PathBuf;

use super::{Better, Case};
use crate::bed::{Bed, Side, Stack};
use crate::figure::Sample;
use crate::{Effort, MeasureError};

pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let mut cases = vec![
        databases::pgbench(effort),
        web::sendfile(effort),
        web::through_haproxy(effort),
    ];
    if !effort.quick {
        cases.extend([
            databases::sysbench(effort),
            databases::mysqlslap(effort),
            web::through_nginx(effort),
            web::python(effort),
            web::gunicorn(effort),
            web::uvicorn(effort),
            web::four_threads(effort),
            mail::dovecot(effort),
        ]);
    }
    cases
}

/// Makes a case that needs some programs, and that fails on Portolan if the kernel accepted any of its connections.
fn case<S: Into<Sample>>(
    name: &str,
    unit: &'static str,
    programs: impl IntoIterator<Item: Into<PathBuf>>,
    measure: impl Fn(&Bed, Stack) -> Result<S, MeasureError> + 'static,
) -> Case {
    let measure = move |bed: &Bed, stack: Stack| {
        let before = bed.kernel_accepted(Side::Server);
        let sample = measure(bed, stack)?;
        match stack {
            Stack::Portolan if bed.kernel_accepted(Side::Server) != before => {
                Err(MeasureError::KernelSockets)
            }
            Stack::Portolan | Stack::Kernel => Ok(sample),
        }
    };
    Case::new(name, unit, Better::Higher, measure).needs(programs)
}
