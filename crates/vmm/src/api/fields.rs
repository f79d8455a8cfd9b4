//! Parameters of a request: a JSON object of a declared type, and a query.
//!
//! The schema of a type defines its fields, their values and units. A derived Deserialize alone
//! would refuse an invalid value without naming its field.

use std::fmt;

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema};
use serde::de::{Deserialize, DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::Value;

use super::http::Request;
use super::reply::{Problem, Status};

/// The schema of `T` as a request, without null values.
pub fn request_schema<T: JsonSchema>() -> Schema {
    let mut settings = SchemaSettings::draft2020_12();
    (settings.meta_schema, settings.inline_subschemas) = (None, true);
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    let required = schema.get("required").cloned().unwrap_or_default();
    if let Some(Value::Object(properties)) = schema.get_mut("properties") {
        properties.values_mut().for_each(drop_null);
        for name in required.as_array().into_iter().flatten().filter_map(Value::as_str) {
            properties[name].as_object_mut().map(|members| members.shift_remove("default"));
        }
    }
    schema
}

/// Removes null from the values that `schema` allows.
pub fn drop_null(schema: &mut Value) {
    let Value::Object(members) = schema else { return };
    if members.get("default") == Some(&Value::Null) {
        members.shift_remove("default");
    }
    if let Some(Value::Array(types)) = members.get_mut("type") {
        types.retain(|name| name != "null");
        if let [name] = types.as_slice() {
            let name = name.clone();
            members.insert("type".to_owned(), name);
        }
    }
    if let Some(Value::Array(choices)) = members.get_mut("enum") {
        choices.retain(|choice| !choice.is_null());
    }
    if let Some(Value::Array(mut choices)) = members.shift_remove("anyOf") {
        choices.retain(|choice| choice["type"] != "null");
        if let [Value::Object(choice)] = choices.as_slice() {
            choice.iter().for_each(|(key, value)| {
                members.entry(key).or_insert_with(|| value.clone());
            });
        }
    }
}

/// Whether a request without a body is treated as an empty object.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EmptyBody {
    Refused,
    Allowed,
}

/// Parses the body of `request` as a `T`.
pub(super) fn body<T: JsonSchema + DeserializeOwned>(
    request: &Request<'_>,
    empty: EmptyBody,
) -> Result<T, Problem> {
    let schema = request_schema::<T>();
    let none = serde_json::Map::new();
    let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&none);
    let known: Vec<_> = properties.keys().map(String::as_str).collect();
    let fields = if empty == EmptyBody::Allowed && request.body.trim_ascii().is_empty() {
        Members(Vec::new())
    } else {
        Members::of_body(request, &known)?
    };
    let required = schema.get("required").and_then(Value::as_array);
    let is_required = |name: &str| required.is_some_and(|names| names.iter().any(|n| n == name));
    for (name, property) in properties {
        match fields.0.iter().find(|(field, _)| field == name) {
            Some((_, value)) => check(name, property, value)?,
            None if is_required(name) => return Err(missing(name, property)),
            None => {}
        }
    }
    let value = Value::Object(fields.0.into_iter().collect());
    // Everything that the schema allows can be deserialized.
    serde_json::from_value(value)
        .map_err(|error| Problem::new(Status::UnprocessableContent, error.to_string()))
}

/// The refusal of a request without the field `name`.
fn missing(name: &str, property: &Value) -> Problem {
    let message = format!("the field '{name}' is missing");
    Problem::new(Status::UnprocessableContent, message)
        .with_field(name)
        .with_remedy(format!("send {}", wanted(property)))
}

/// Refuses a `value` that the schema `property` of the field `name` does not allow.
fn check(name: &str, property: &Value, value: &Value) -> Result<(), Problem> {
    let is_path = property.get("pattern").is_some();
    let is_right = match (choices(property), property["type"].as_str()) {
        (Some(choices), _) => choices.contains(&value.as_str().unwrap_or_default()),
        (None, Some("boolean")) => value.is_boolean(),
        (None, Some("integer")) => {
            let (least, most) = bounds(property);
            value.as_u64().is_some_and(|number| (least..=most).contains(&number))
        }
        _ => value.as_str().is_some_and(|text| {
            !text.is_empty() && !text.contains('\0') && (!is_path || text.starts_with('/'))
        }),
    };
    if is_right {
        return Ok(());
    }
    let no_path = if is_path { ", which is not an absolute path" } else { "" };
    let message = format!("the field '{name}' is {}{no_path}", describe(value));
    Err(Problem::new(Status::UnprocessableContent, message)
        .with_field(name)
        .with_remedy(format!("send {}", wanted(property))))
}

/// The words that a schema allows, if it is an enumeration.
pub fn choices(property: &Value) -> Option<Vec<&str>> {
    if let Some(words) = property["enum"].as_array() {
        return Some(words.iter().filter_map(Value::as_str).collect());
    }
    let variants = property["oneOf"].as_array()?;
    Some(variants.iter().filter_map(|variant| variant["const"].as_str()).collect())
}

/// The minimum and maximum that a schema allows.
pub fn bounds(property: &Value) -> (u64, u64) {
    let bound = |key: &str| property[key].as_u64();
    (bound("minimum").unwrap_or(0), bound("maximum").unwrap_or(u64::MAX))
}

/// Describes the values that a schema allows.
fn wanted(property: &Value) -> String {
    match (choices(property), property["type"].as_str()) {
        (Some(words), _) => format!("one of {}", words.join(", ")),
        (None, Some("boolean")) => "true or false".to_owned(),
        (None, Some("integer")) => {
            let (least, most) = bounds(property);
            let unit = property["x-unit"].as_str().unwrap_or("units");
            format!("a whole number of {unit}, from {least} to {most}")
        }
        _ if property.get("pattern").is_some() => {
            "an absolute path on the monitor's host".to_owned()
        }
        _ => property["x-form"].as_str().unwrap_or("a text").to_owned(),
    }
}

/// A value for an error message: short, with its type.
fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) if number.is_f64() => {
            format!("the number {number}, which is not a whole one in range")
        }
        Value::Number(number) => format!("{number}, which is out of range"),
        Value::String(text) if text.len() <= 40 => format!("the string {text:?}"),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

fn one_of(known: &[&str]) -> String {
    match known {
        [] => "send none".to_owned(),
        known => format!("known: {}", known.join(", ")),
    }
}

/// Checks for an absent body. A PUT without parameters may have an empty JSON object as its body,
/// because some clients always send one. A GET with a body was probably meant to be a PUT.
pub(super) fn no_body(request: &Request<'_>) -> Result<(), Problem> {
    if request.body.trim_ascii().is_empty() {
        return Ok(());
    }
    if request.method == "GET" {
        let message = format!("GET {} must not have a body", request.path);
        return Err(
            Problem::new(Status::BadRequest, message).with_remedy("use PUT to change something")
        );
    }
    Members::of_body(request, &[]).map(|_| ())
}

/// The parameters of a query; unknown ones are refused.
pub(super) struct Parameters<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Parameters<'a> {
    pub(super) fn of_query(request: &Request<'a>, known: &[&str]) -> Result<Self, Problem> {
        let pairs: Vec<_> = request
            .query
            .unwrap_or_default()
            .split('&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
            .collect();
        for (index, (name, _)) in pairs.iter().enumerate() {
            let shown = name.escape_debug();
            if !known.contains(name) {
                let message = format!("{} has no query parameter '{shown}'", request.path);
                return Err(Problem::new(Status::BadRequest, message).with_remedy(one_of(known)));
            }
            if pairs[..index].iter().any(|(earlier, _)| earlier == name) {
                let message = format!("the query parameter '{shown}' occurs twice");
                return Err(Problem::new(Status::BadRequest, message));
            }
        }
        Ok(Self(pairs))
    }

    pub(super) fn integer(&self, name: &str) -> Result<Option<u64>, Problem> {
        let Some((_, text)) = self.0.iter().find(|(key, _)| *key == name) else {
            return Ok(None);
        };
        text.parse().map(Some).map_err(|_| {
            let message = format!(
                "the query parameter '{name}' is '{}', not a whole number",
                text.escape_debug()
            );
            Problem::new(Status::BadRequest, message)
        })
    }
}

/// The members of a JSON object; unknown and duplicate ones are refused.
struct Members(Vec<(String, Value)>);

impl Members {
    fn of_body(request: &Request<'_>, known: &[&str]) -> Result<Self, Problem> {
        if request.body.trim_ascii().is_empty() {
            let message =
                format!("{} {} needs a JSON object as its body", request.method, request.path);
            return Err(Problem::new(Status::BadRequest, message)
                .with_remedy(format!("send an object with {}", known.join(", "))));
        }
        let fields: Self =
            serde_json::from_slice(request.body).map_err(|error| match error.classify() {
                serde_json::error::Category::Data => Problem::new(
                    Status::UnprocessableContent,
                    format!("the body is not a JSON object: {error}"),
                ),
                _ => Problem::new(Status::BadRequest, format!("the body is not JSON: {error}")),
            })?;
        for (index, (name, _)) in fields.0.iter().enumerate() {
            let shown = name.escape_debug();
            if !known.contains(&name.as_str()) {
                let message =
                    format!("unknown field '{shown}' for {} {}", request.method, request.path);
                return Err(Problem::new(Status::UnprocessableContent, message)
                    .with_field(name.as_str())
                    .with_remedy(one_of(known)));
            }
            if fields.0[..index].iter().any(|(earlier, _)| earlier == name) {
                let message = format!("the field '{shown}' occurs twice");
                return Err(
                    Problem::new(Status::UnprocessableContent, message).with_field(name.as_str())
                );
            }
        }
        Ok(fields)
    }
}

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MembersVisitor)
    }
}

struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = Members;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(Members(members))
    }
}
