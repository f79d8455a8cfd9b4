//! All counters of a monitor.

use ebb_vmm::api::{Client, prometheus};
use serde_json::json;

use super::{Form, Row, bytes, write_table};

/// Prints them.
pub(super) fn show(out: &mut Vec<u8>, form: Form, client: &Client) -> anyhow::Result<()> {
    let reply = client.request("GET", "/metrics", "")?;
    let samples = prometheus::parse(&reply.body)
        .map_err(|line| anyhow::anyhow!("the monitor sent a metric of unknown form: '{line}'"))?;
    match form {
        Form::Json => {
            let list: Vec<_> = samples
                .iter()
                .map(|sample| {
                    let value = number(sample.value);
                    json!({ "name": sample.name, "kind": sample.kind, "value": value })
                })
                .collect();
            serde_json::to_writer_pretty(&mut *out, &json!({ "metrics": list }))?;
            out.push(b'\n');
        }
        Form::Table => {
            let rows: Vec<Row> = samples
                .iter()
                .map(|sample| {
                    let name = sample.name.strip_prefix("ebb_").unwrap_or(&sample.name);
                    let what = match &sample.kind {
                        Some(kind) => format!("{name} {kind}"),
                        None => name.to_owned(),
                    };
                    let value = if name.contains("_bytes") {
                        format!("{} ({})", sample.value, bytes(sample.value as u64))
                    } else {
                        sample.value.to_string()
                    };
                    Row(what, value)
                })
                .collect();
            write_table(out, &rows)?;
        }
    }
    Ok(())
}

/// Formats whole numbers without a decimal point.
fn number(value: f64) -> serde_json::Value {
    // Beyond 2^53 a float has no fraction but is not exact either.
    if value.fract() == 0.0 && (0.0..9e15).contains(&value) {
        json!(value as u64)
    } else {
        json!(value)
    }
}
